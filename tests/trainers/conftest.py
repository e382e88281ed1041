import cells


def pytest_configure(config):
    config.pluginmanager.register(cells)
