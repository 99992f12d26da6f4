"""The service under overload and faults."""
