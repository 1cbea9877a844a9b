"""What is kept of workloads on disk, to bring them back from: images of processes, and what applications saved."""
