"""What the queries and keys of a model's attention look like while it runs: where FP16 scores overflow, and why."""
