"""The command line as a module, for launchers that start modules."""

from trainsentry.monitor.cli.app import main

main()
