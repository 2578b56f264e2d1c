"""Trains models on any backend that provides a training step (`ttpu.Trainer`, `ttpu train`)."""
