"""The verbs of the ``leasehold`` command, one module per verb, and what verbs share."""
