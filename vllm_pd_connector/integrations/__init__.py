"""What serving engines need to run the connector by a line of their own configuration: one module per engine.

Here: how an engine's replicas get their addresses and names, and how it shapes the two legs of a request. Never here:
anything that an instance needs. Nothing else imports from here, so an engine's library is needed by its users alone.
"""
