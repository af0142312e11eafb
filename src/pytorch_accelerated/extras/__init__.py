"""What no run needs: each file and folder here can be deleted, and stands on names that users can import, too."""
