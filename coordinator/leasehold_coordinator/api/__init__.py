"""The gRPC services. Only this package turns errors into gRPC statuses."""
