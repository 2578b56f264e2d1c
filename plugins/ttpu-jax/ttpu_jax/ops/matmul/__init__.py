"""Products with quantized kernels: one public function, a reference, and the implementations that it chooses from."""

from ttpu_jax.ops.matmul.api import quantized_matmul

__all__ = ["quantized_matmul"]
