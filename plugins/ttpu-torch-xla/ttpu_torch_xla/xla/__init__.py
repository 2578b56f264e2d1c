"""torch_xla as the backend's runtime. Only the modules of this package import torch_xla."""
