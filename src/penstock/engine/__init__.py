"""What happens inside one rank."""
