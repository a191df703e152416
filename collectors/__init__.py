"""What is observed and how it becomes numbers: series, step records, statistics, hooks."""
