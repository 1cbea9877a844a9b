"""What is known of workers and workloads now, who watches, and who is connected."""
