"""`python -m trainsentry`: the command line."""

from trainsentry.monitor.cli.app import main

if __name__ == "__main__":
    main()
