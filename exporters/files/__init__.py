"""Files on disk: writing them whole, and reading what somebody else wrote."""
