"""Host loops: which ops run chunk by chunk, on which streams, in what order.

A schedule and `stream` annotations come in; host loops go out, formed before allocations are
decided. Start at streams.py; that a chunk is enough where only a chunk is allocated is proven in
verify_chunks.py.
"""
