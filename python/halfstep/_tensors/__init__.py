"""Parameters and gradients: everything that knows torch's tensors."""
