"""The requests and replies of the HTTP interface."""
