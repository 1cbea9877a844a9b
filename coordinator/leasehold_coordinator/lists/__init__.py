"""Lists of the API: filters, orders and pages. Pure."""
