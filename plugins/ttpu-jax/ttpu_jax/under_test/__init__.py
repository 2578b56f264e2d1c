"""The JAX backend's implementation of the conformance kit's protocols (`ttpu_conformance.model_under_test`)."""
