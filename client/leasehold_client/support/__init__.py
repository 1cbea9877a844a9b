"""The archive of ``leasehold support-bundle``: its parts, what they leave out, and its form."""
