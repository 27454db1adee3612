"""What is remote: Lightning Server, Lightning Client, and stores over HTTP."""
