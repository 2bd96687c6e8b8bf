"""What goes over the wire: pydantic models of requests, answers and chunks."""
