"""What a person runs: the command line and one folder per experiment."""
