"""`outrider verify`: holds a server, or an engine in process, against plain decoding and the exact law."""
