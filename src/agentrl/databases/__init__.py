"""The domain and its ledger: documents, transitions, arrays, connection, embedded mongod.

It imports nothing else of the package. Samplers, trainer and launcher all use it.
"""
