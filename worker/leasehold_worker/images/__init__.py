"""What is kept of workloads on disk: images of processes, and what applications saved of themselves."""
