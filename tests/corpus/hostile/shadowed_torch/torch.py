mine = True


def relu(x):
    return x
