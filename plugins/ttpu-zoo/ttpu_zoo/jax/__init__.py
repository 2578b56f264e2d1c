"""Parts of the zoo's types for the JAX backend, which alone imports them."""
