"""Checks the accuracy of the calls of a dump, in processes of their own."""
