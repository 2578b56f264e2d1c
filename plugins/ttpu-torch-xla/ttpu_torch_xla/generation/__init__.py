from ttpu_torch_xla.generation.generate import install

__all__ = ["install"]
