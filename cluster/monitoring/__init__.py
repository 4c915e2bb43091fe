"""What an operator sees: every metric's definition, and the dashboard and the alerts that are generated from them."""
