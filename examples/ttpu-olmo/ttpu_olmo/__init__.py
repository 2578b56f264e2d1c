"""OLMo 2 and OLMo 3, as TTPU plugins: one module per `model_type`."""
