"""`python -m din_extproc`: the console script without its installation."""

from din_extproc.cli import main

if __name__ == "__main__":
    main()
