"""Stands in for vLLM, of which SGLang imports one function where it has no kernels of its own."""
