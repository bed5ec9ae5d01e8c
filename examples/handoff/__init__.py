"""Parts of `examples/transformers_prefill_decode.py`."""
