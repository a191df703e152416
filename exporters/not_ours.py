"""What is raised about files of somebody else; apart from what reads tables, for that takes pandas."""


class NotOurs(ValueError):
    """A directory or file that trainsentry did not write."""
