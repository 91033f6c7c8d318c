"""`python -m deepinfra` is the command `deepinfra`."""

from deepinfra.cli import main

if __name__ == "__main__":
    main()
