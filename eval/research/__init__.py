"""Studies of training and of number formats: not part of what the package promises."""
