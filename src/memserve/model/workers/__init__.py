"""An instance of several workers: their parts of the model, their sums, their processes."""
