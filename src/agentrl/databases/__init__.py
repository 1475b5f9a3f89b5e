"""The domain and its ledger: documents, transitions, arrays, connection, embedded mongod.

Imports nothing else of the package: samplers, trainer and launcher meet here.
"""
