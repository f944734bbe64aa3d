"""Pure functions of tensors: divergences, distributions, a quadratic programme, addressable noise."""
