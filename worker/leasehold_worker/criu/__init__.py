"""Process images by CRIU."""
