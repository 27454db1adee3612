"""Word problems of Calc-X with AutoGen and a calculator."""
