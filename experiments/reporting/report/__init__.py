"""Runs as one HTML file that needs no network: verdict, figures, pictures, and every output token by token."""
