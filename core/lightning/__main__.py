"""`python -m lightning` is the `lightning` command."""

from lightning.cli.app import main

if __name__ == "__main__":
    main()
