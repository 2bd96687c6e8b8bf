"""The endpoints: thin handlers around the services."""
