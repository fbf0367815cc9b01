"""Every message between processes, as msgpack structs that refuse unknown fields.

Imported at both ends of each message: engine core, workers, API server, readers and trainers. It
imports nothing else of clairai.
"""
