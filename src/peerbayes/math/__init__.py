"""Pure functions of tensors: divergences, Dirichlet and Gaussian distributions, least norms, addressable noise."""
