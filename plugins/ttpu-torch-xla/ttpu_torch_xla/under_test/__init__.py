"""This backend as the conformance kit checks it (`ttpu_conformance.model_under_test`)."""
