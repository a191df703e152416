"""`python -m trainsentry.pytorch.monitor.anomaly_analyse`, with the options of msprobe's command."""

from trainsentry.monitor.cli.anomaly_analysis import main

if __name__ == "__main__":
    main()
