"""Records as OpenTelemetry traces (`--otlp_endpoint`).

tracing.py    whether a sampler traces its Records, and where
ended.py      what is handed over: a Record at its end, its turns, and why it failed
names.py      the names of attributes: OpenTelemetry's for generative AI, and our own
spans.py      a Record that has ended, with its turns, as the spans of a trace
export.py     sends them, in a thread of its own that nobody waits for

`spans.py` and `export.py` need `requirements-traces.txt` and are imported where traces are asked
for.
"""
