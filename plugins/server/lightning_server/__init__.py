"""What is remote: stores over HTTP, and clients that run agents for servers on other machines."""
