"""The command line, and one folder for each kind of experiment."""
